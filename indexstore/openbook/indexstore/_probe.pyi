import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.head import HeadIndex, Step

def attend(
    parts: list[tuple[Step, int, int]], workspace: list[NDArray[np.uint8]], lift_log_max: float
) -> list[tuple[NDArray[np.uint32], NDArray[np.float32]]]: ...
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
