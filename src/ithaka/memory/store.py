"""Where kept activations live."""

from collections.abc import Iterator

from torch import Tensor


class Kept:
    """A tensor kept on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def fetch(self) -> Tensor:
        return self._tensor

    def tiles(self, slices: list[slice]) -> Iterator[tuple[slice, Tensor]]:
        for rows in slices:
            yield rows, self._tensor[rows]


class Store:
    def keep(self, tensor: Tensor, tier: str = "device") -> Kept:
        return Kept(tensor)
