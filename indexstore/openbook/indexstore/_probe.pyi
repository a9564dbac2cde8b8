from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

from openbook.indexstore.head import HeadIndex

@disjoint_base
class Workspace: ...

def attend(
    tasks: list[tuple[Any, ...]], workspace: Workspace, lift_log_max: float
) -> list[tuple[NDArray[np.uint32], NDArray[np.float32], int]]: ...
def find(
    index: HeadIndex,
    queries: NDArray[np.float32],
    scaling: float,
    wanted: int,
    candidates: int,
    reach: float,
) -> tuple[
    NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32], int
]: ...
