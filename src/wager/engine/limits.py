"""What a request must fit into."""

from __future__ import annotations

from wager.errors import RequestError
from wager.kernels.base import BLOCK_SIZE
from wager.kv.blocks import blocks_for
from wager.types import Request


def check_length(request: Request, *, max_context: int, num_blocks: int) -> None:
    """RequestError if a request could never fit, even alone."""
    prompt_tokens = len(request.prompt)
    need = min(prompt_tokens + request.params.max_tokens, max_context)
    if prompt_tokens >= max_context:
        raise RequestError(
            f"Request {request.id!r} has {prompt_tokens} prompt tokens; the context holds "
            f"{max_context}, at least one of them for the answer.",
            "Shorten the prompt, or raise --max-context if the model allows it.",
        )
    if blocks_for(need) > num_blocks:
        raise RequestError(
            f"Request {request.id!r} may grow to {need} tokens; the cache holds {num_blocks * BLOCK_SIZE}.",
            "Lower max_tokens, shorten the prompt, or give the cache more memory (--memory).",
        )
