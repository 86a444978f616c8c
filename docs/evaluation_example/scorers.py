"""Scorers of the example suite: functions of an item's fields and of the text that the model wrote."""

import ast


def parses(item, text):
    """Whether the line, prompt and completion together, is a line of Python."""
    try:
        ast.parse((item["prompt"] + text).strip())
    except SyntaxError:
        return False
    return True
