"""A drafter in 40 lines: what followed the last two tokens before follows again, and so on from there.

Use: pip install ./examples/custom_drafter
     outrider generate --method pair-memory "Say three times: the rain in Spain stays mainly in the plain."
     outrider check --method pair-memory --quick
"""

from collections.abc import Sequence

from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise, Recipe
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import TokenTree, chain
from outrider.methods import MethodInfo, Options, Parts
from outrider.methods.common import controller, verifier


class PairMemory:
    name, needs, shared_noise = "pair-memory", Needs(), False  # it wants nothing of the model

    def __init__(self) -> None:
        self.contexts: dict[int, Context] = {}  # by slot
        self.next: dict[int, dict[tuple[int, ...], int]] = {}  # by slot: two tokens -> the one that came behind them

    def begin(self, slot: int, context: Context) -> None:
        self.contexts[slot], self.next[slot] = context, {}
        self.learn(slot, context.tokens.tolist())

    def learn(self, slot: int, text: list[int]) -> None:
        self.next[slot].update(((a, b), c) for a, b, c in zip(text, text[1:], text[2:], strict=False))

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """The prompt was read in `begin`; what the model computed for it is of no use here."""

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self.draft(slot, min(b.nodes, b.depth)) for slot, b in zip(slots, budgets, strict=True)])

    def draft(self, slot: int, most: int) -> TokenTree:
        text = self.contexts[slot].tokens[-2:].tolist()
        while len(text) < 2 + most and (token := self.next[slot].get(tuple(text[-2:]))) is not None:
            text.append(token)
        return chain(text[:2][-1], text[2:], origin=self.name)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            self.learn(slot, self.contexts[slot].tokens[-len(record.emitted) - 2 :].tolist())

    def end(self, slot: int) -> None:
        del self.contexts[slot], self.next[slot]


def build(parts: Parts, options: Options) -> Recipe:
    return Recipe("pair-memory", PairMemory(), verifier("invariant"), controller("payoff", 8))


METHOD = MethodInfo(
    name="pair-memory", summary="what followed the last two tokens before", paper="-", family="example",
    lossless=True, needs="nothing", options=Options, build=build,
)  # fmt: skip
