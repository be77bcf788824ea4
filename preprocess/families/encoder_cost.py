"""How much work a picture is for its vision encoder, counted from the sizes in `config.json`.

Where pictures keep their size, attention over a large one grows with the square of its tokens. Counting tells before
anything is loaded how large a picture may be that a processor gets through in reasonable time.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

_MOST_TOKENS: Final = 1 << 24
"""No picture has more; up to here a count is searched for."""


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """Sizes that the work follows from.

    Attributes:
        hidden_size: Of a patch inside.
        num_layers: All of them.
        mlp_weights: Of one layer's MLP.
        patches_per_token: That become one vision token.
        full_layers: Whose attention sees the whole picture.
        window: Patches that the attention of the others sees.
    """

    hidden_size: int
    num_layers: int
    mlp_weights: int
    patches_per_token: int
    full_layers: int
    window: int = 0

    def operations(self, num_tokens: int) -> int:
        """Multiplications and additions over a picture of so many vision tokens, in the layers alone: what comes before
        and after them is a hundredth of it.
        """
        patches = num_tokens * self.patches_per_token
        linear = self.num_layers * (4 * self.hidden_size**2 + self.mlp_weights)
        seen = self.full_layers * patches + (self.num_layers - self.full_layers) * min(self.window, patches)
        return 2 * patches * linear + 4 * patches * seen * self.hidden_size

    def tokens_within(self, operations: int) -> int:
        """The largest picture, in vision tokens, that takes no more operations; at least 1."""
        return max(bisect_right(range(_MOST_TOKENS), operations, key=self.operations) - 1, 1)
