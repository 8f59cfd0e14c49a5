"""Lossless speculative decoding for JAX."""

from specjax.api import GenerationResult, TokenLogProbs, generate, stream_text
from specjax.checkpoints.drafters import load_drafter, save_drafter
from specjax.checkpoints.targets import load_target, save_target
from specjax.decoding.loop import decode, init_decode_state, stream
from specjax.decoding.sampling import draw_draft
from specjax.decoding.step import speculate_step
from specjax.decoding.types import (
    DecodeConfig,
    DecodeState,
    DraftDist,
    DrafterModel,
    Proposal,
    RoundOutput,
    RoundStats,
    SamplingParams,
    SamplingState,
    TargetModel,
    TargetOutput,
)
from specjax.drafters import Drafter
from specjax.models.target import Target

__all__ = [
    "DecodeConfig",
    "DecodeState",
    "DraftDist",
    "Drafter",
    "DrafterModel",
    "GenerationResult",
    "Proposal",
    "RoundOutput",
    "RoundStats",
    "SamplingParams",
    "SamplingState",
    "Target",
    "TargetModel",
    "TargetOutput",
    "TokenLogProbs",
    "decode",
    "draw_draft",
    "generate",
    "init_decode_state",
    "load_drafter",
    "load_target",
    "save_drafter",
    "save_target",
    "speculate_step",
    "stream",
    "stream_text",
]
