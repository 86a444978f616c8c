"""Slots, the packed buffers that they live in, and the four collectives that move them."""

from megatron_probes.ledger.ledger import Ledger, LedgerMismatch
from megatron_probes.ledger.slot import Kind, Slot, Source
from megatron_probes.ledger.transfer import Outbox, Payload

__all__ = ["Kind", "Ledger", "LedgerMismatch", "Outbox", "Payload", "Slot", "Source"]
