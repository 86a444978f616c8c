"""The parts of `overhead.py`: the plan of steps, the switch inside training, the counts, the interval."""
