"""The parallel layouts, as Megatron's flags."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of `ranks` processes; dp is what the other axes leave."""

    name: str
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch: int = 2
    flags: tuple[str, ...] = ()

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.cp)

    def all_flags(self) -> list[str]:
        flags = [
            f"--tensor-model-parallel-size={self.tp}",
            f"--pipeline-model-parallel-size={self.pp}",
            f"--context-parallel-size={self.cp}",
            f"--micro-batch-size={self.micro_batch}",
            *self.flags,
        ]
        if self.ep > 1:
            flags.append(f"--expert-model-parallel-size={self.ep}")
        return flags

    def of_experts(self) -> Layout:
        """The same layout for a mixture of experts, which needs sequence parallelism where tp > 1."""
        if self.tp == 1 or "--sequence-parallel" in self.flags:
            return self
        return replace(self, flags=(*self.flags, "--sequence-parallel"))


ONE = Layout(name="1 rank")
DP2 = Layout(name="DP2", ranks=2)
TP2_SP = Layout(name="TP2+SP", ranks=2, tp=2, flags=("--sequence-parallel",))
PP2 = Layout(name="PP2", ranks=2, pp=2)
CP2 = Layout(name="CP2", ranks=2, cp=2)
EP2 = Layout(name="EP2", ranks=2, ep=2)
TP2_PP2_DP2 = Layout(name="TP2xPP2xDP2", ranks=8, tp=2, pp=2, flags=("--sequence-parallel",))
