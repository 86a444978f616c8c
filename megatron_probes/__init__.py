"""Training-health instruments for Megatron-LM and TorchTitan."""

__version__ = "0.1.0"
