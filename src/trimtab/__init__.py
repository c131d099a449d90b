"""Adaptive speculative decoding: verify only the draft tokens that pay for themselves."""

__version__ = "0.1.0"
