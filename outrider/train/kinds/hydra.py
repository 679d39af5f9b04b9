"""Training Hydra's heads: as Medusa's, each told the tokens that stand in the text before the one it says.

arXiv 2402.05109, with the target's distribution as the goal. Column u, head k reads the feature at u and the tokens at
u + 1 to u + 1 + k: when drafting, the pending token and the candidates of the same path.
"""

from __future__ import annotations

from pathlib import Path

from outrider.models import LoadedModel
from outrider.models.networks.heads import HydraHeads
from outrider.train.kinds.medusa import HeadsLearner, HeadsPlan, heads_learner
from outrider.train.text.selfdata import SelfData


def hydra_learner(target: LoadedModel, data: SelfData, plan: HeadsPlan, begin: Path | None) -> HeadsLearner:
    """Untrained, or going on from the finished drafter in `begin`."""
    return heads_learner("hydra", HydraHeads, target, data, plan, begin)
