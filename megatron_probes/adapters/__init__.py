"""One package a training framework: the only code that knows its names."""
