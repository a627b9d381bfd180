"""A request of SGLang: tokens, position, salt, and what decides its next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pf_connector.sampling import recorded
from pf_connector.tokens import Packed
from pf_connector.wishes import KEY, Wishes

_RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "sampling_seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "max_new_tokens",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
)
"""Sampling settings that a snapshot records if they are not the default."""
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


class View:
    """A request, with the names that `pf_connector.holding` uses. The salt is that of the
    request as it came: the connector may give it another place in the tree later."""

    def __init__(self, req: Any) -> None:
        self.req = req
        self.request_id = str(req.rid)
        self.salt = salt(req)
        self.wishes = Wishes.of(getattr(req.sampling_params, "custom_params", None))

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output. After its end without what follows a stop."""
        output = self.req.output_ids_through_stop if self.req.finished() else self.req.output_ids
        return [int(token) for token in self.req.origin_input_ids] + [int(token) for token in output]

    @property
    def asked_token_ids(self) -> Sequence[int]:
        """The same for a request that has come, without a copy: it has no output yet, as a rule."""
        prompt: Sequence[int] = self.req.origin_input_ids
        return self.all_token_ids if len(self.req.output_ids) else prompt

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose state is at rest between two steps. The last token is chosen; a step in
        flight may compute it. While the prompt is computed there is none."""
        output = len(self.req.output_ids)
        return len(self.req.origin_input_ids) + output - 1 if output else 0


def salt(req: Any) -> str:
    """The salt of the prefix key: what separates prefixes in SGLang's tree."""
    words = [req.cache_salt or ""]
    if req.extra_key:
        words.append(f"extra-key:{req.extra_key}")
    return "\n".join(words)


def unfit(req: Any) -> str | None:
    """Why the tokens of a request do not tell its state, or its state is not in the tree."""
    if req.lora_id is not None:
        return "its adapter has no digest that the connector knows"
    if req.multimodal_inputs is not None or req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "its inputs are not only tokens"
    if req.session is not None:
        return "it belongs to a session of SGLang's"
    return "it is kept out of SGLang's cache" if req.skip_radix_cache_insert else None


def sequence(view: View, boundary: int, blocks: dict[str, list[int]]) -> dict[str, Any]:
    """The protocol's `Sequence` of a request at a token position."""
    return {
        "id": view.request_id,
        # The token at the position is chosen and not computed. The request may have gone on.
        "tokens": Packed.of(view.all_token_ids, boundary + 1),
        "boundary": boundary,
        "blocks": blocks,
        "salt": view.salt,
        "sampling": {"prompt_tokens": len(view.req.origin_input_ids), **recorded(view.req.sampling_params, _RECORDED)},
        "unrecorded": unrecorded(view.req),
    }


def unrecorded(req: Any) -> list[str]:
    """Names of state that affects the next token and is neither in memory nor in `sampling`."""
    params, found = req.sampling_params, []
    if params.temperature > 0 and params.top_k != 1:
        # SGLang turns greedy sampling into the one best token.
        found.append("rng")
    if any(getattr(params, name, None) is not None for name in _GRAMMARS):
        found.append("grammar")
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1 or params.min_new_tokens:
        # They count generated tokens; after a restore all are prompt.
        found.append("penalties")
    if req.custom_logit_processor is not None:
        found.append("logits-processors")
    return found


__all__ = ["KEY", "View", "salt", "sequence", "unfit", "unrecorded"]
