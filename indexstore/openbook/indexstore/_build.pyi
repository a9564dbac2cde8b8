import numpy as np
from numpy.typing import NDArray

def companions(
    neighbours: NDArray[np.int32],
    m: int,
    width: int,
    occurrences_max: int,
    span: int,
    discount: NDArray[np.float32],
) -> NDArray[np.uint32]: ...
def near_keys(
    points: NDArray[np.float32],
    half_norms: NDArray[np.float32],
    order: NDArray[np.uint32],
    starts: NDArray[np.int64],
    near_clusters: NDArray[np.uint32],
    width: int,
    pool_max: int,
) -> NDArray[np.uint32]: ...
def link(
    wanted: NDArray[np.uint32],
    near: NDArray[np.uint32],
    degree: int,
    spare: int,
    wanted_first: int,
    near_first: int,
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]: ...
def repair(
    graph: NDArray[np.uint32],
    sizes: NDArray[np.int64],
    near: NDArray[np.uint32],
    entry: int,
) -> int: ...
def reachable(graph: NDArray[np.uint32], entry: int) -> int: ...
def group_sums(
    rows: NDArray[np.float32], cluster_of: NDArray[np.intp], count: int
) -> NDArray[np.float32]: ...
def train(pairs: NDArray[np.float32], codebook: NDArray[np.float32], steps: int) -> None: ...
def encode(pairs: NDArray[np.float32], codebook: NDArray[np.float32]) -> NDArray[np.uint8]: ...
