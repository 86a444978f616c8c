"""The validated configuration: from YAML to a frozen tree, or to a message that names the fix."""

from megatron_probes.config.describe import FieldDoc, describe_config
from megatron_probes.config.load import ConfigError, load_config
from megatron_probes.config.model import OTHER_SOURCE, ProbeConfig

__all__ = ["OTHER_SOURCE", "ConfigError", "FieldDoc", "ProbeConfig", "describe_config", "load_config"]
