"""The parallel layout that a model is evaluated in."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_probes.evaluation.megatron.checkpoint import Checkpoint
from megatron_probes.evaluation.suite import SuiteError


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    """Copies of the model, which share the rows of each batch."""
    ep: int = 1
    """Of dp * tp, how many ranks share the experts."""

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.tp * self.pp * self.dp

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises ``SuiteError`` where ``checkpoint`` can't be loaded in this layout."""
        args = checkpoint.args
        if checkpoint.format == "torch":
            saved = checkpoint.saved_layout
            if (saved.tp, saved.pp, saved.ep) != (self.tp, self.pp, self.ep):
                raise SuiteError(
                    f"--checkpoint: {checkpoint.folder} is a legacy checkpoint and loads only in the layout "
                    f"that saved it: give --tp {saved.tp} --pp {saved.pp} --ep {saved.ep}, or convert it: "
                    "load it in that layout by Megatron with --ckpt-format torch "
                    "--ckpt-convert-format torch_dist --ckpt-convert-save DIR"
                )
        for option, size, name, whole in (
            ("--tp", self.tp, "attention heads", args.num_attention_heads),
            ("--tp", self.tp, "vocabulary entries", args.padded_vocab_size),
            ("--pp", self.pp, "layers", args.num_layers),
            ("--ep", self.ep, "experts", args.num_experts or self.ep),
        ):
            if whole % size:
                raise SuiteError(
                    f"{option} {size}: the model's {whole} {name} can't be split so; give a divisor"
                )
        if (self.tp * self.dp) % self.ep:
            raise SuiteError(f"--ep {self.ep}: must divide the {self.tp * self.dp} ranks of a pipeline stage")
