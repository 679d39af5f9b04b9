"""The form of `/v1/completions`: a text, several, or token ids, continued as they are."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outrider.core.errors import InputError
from outrider.serve.forms.sampling import MAX_TOP, Count, Sampling, Token
from outrider.serve.text import Text

DEFAULT_NEW = 16  # tokens, as OpenAI's
MAX_PROMPTS = 256


class CompletionForm(Sampling):
    prompt: str | list[str] | list[Token] | list[list[Token]]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    best_of: Count | None = None
    n_predict: Count | None = None  # llama.cpp's name of max_tokens
    add_special_tokens: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens or self.n_predict

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self, text: Text) -> list[list[int]]:
        if self.suffix:
            raise InputError("suffix: filling in the middle is not done; leave it out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InputError("best_of: texts are not ranked; leave it out, or take n of them")
        given = self.prompt
        items = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not items:
            raise InputError("prompt: there are none; give at least one text")
        if len(items) > MAX_PROMPTS:
            raise InputError(f"prompt: there are {len(items)}; give at most {MAX_PROMPTS} in one request")
        special = self.add_special_tokens is not False
        ids = [text.encode(one, special) if isinstance(one, str) else list(one) for one in items]  # type: ignore[arg-type]
        if not all(ids):
            raise InputError("prompt: one is empty; give at least one character")
        return ids
