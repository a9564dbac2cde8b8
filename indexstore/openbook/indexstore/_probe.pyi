import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.head import CANDIDATES_PER_KEY as CANDIDATES_PER_KEY
from openbook.indexstore.head import DEFAULT_KEYS as DEFAULT_KEYS
from openbook.indexstore.head import HeadIndex

__pyx_capi__: dict[str, object]  # what _layer.pyx calls

def candidates_of(queue: int, keys: int) -> int: ...
def find(
    index: HeadIndex,
    queries: NDArray[np.float32],
    scaling: float,
    wanted: int,
    candidates: int,
    reach: float,
    all_scored: bool,
    workspace: list[NDArray[np.uint8]],
) -> tuple[
    NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32], int
]: ...
