"""The demo's parts: its text, its anomaly, the training process and the report."""
