import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.head import HeadIndex

def find(
    index: HeadIndex,
    queries: NDArray[np.float32],
    scaling: float,
    wanted: int,
    walk: bool,
    queue: int,
    all_scored: bool,
    seeds_per_head: int,
    slack: float,
) -> tuple[
    NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32], int
]: ...
def levels() -> tuple[str, ...]: ...
def score_int8(
    queries: NDArray[np.int16], keys: NDArray[np.int8], ids: NDArray[np.uint32], level: str
) -> NDArray[np.int32]: ...
