"""Gated DeltaNet for wide beams: the prompt's state once per request, short transition records per row (OneLA)."""

from app.ops.gdn.chunked import Chunks, chunked_delta_rule, plan_chunks
from app.ops.gdn.convolution import causal_convolution, window_convolution
from app.ops.gdn.gates import decay_and_beta, gated_norm, inverse_length, unit_keys, unit_queries
from app.ops.gdn.launch import fused_replay, unfit, unfit_state
from app.ops.gdn.packed import pack, unpack
from app.ops.gdn.replay import Record, Records, replay, stored_delta

__all__ = [
    "Chunks",
    "Record",
    "Records",
    "causal_convolution",
    "chunked_delta_rule",
    "decay_and_beta",
    "fused_replay",
    "gated_norm",
    "inverse_length",
    "pack",
    "plan_chunks",
    "replay",
    "stored_delta",
    "unfit",
    "unfit_state",
    "unit_keys",
    "unit_queries",
    "unpack",
    "window_convolution",
]
