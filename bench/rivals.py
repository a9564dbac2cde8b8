"""Indexes of public libraries, each as its makers would set it up for one KV head.

Owns their builds and parameters; which setting is measured is tuning.py's to choose. Every library
searches with one thread and is handed the group's queries in one call. Inner product ranks the
same with the mean key taken off, and k-means and graphs do better so: all are given centred keys.
A library that is not installed says so when its index is made (ImportError).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from contenders import Ids
from numpy.typing import NDArray
from pairs import KEYS, Floats, Training

from openbook.indexstore.dtypes import fits, to_stored
from openbook.indexstore.head import Stored

Variant = dict[str, Any]
BEAMS = (100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200)  # ef: at least KEYS
GRAPH_VARIANTS: tuple[Variant, ...] = (
    {"links": 16, "metric": "ip"},
    {"links": 32, "metric": "ip"},
    {"links": 32, "metric": "l2"},
)
BUILD_BEAM = 200  # efConstruction, as hnswlib's and faiss's examples have it


def centred(keys: Floats) -> Floats:
    """Return keys (m, d) less their mean."""
    return np.ascontiguousarray(keys - keys.mean(axis=0))


def lengthened(keys: Floats) -> Floats:
    """Return keys (m, d + 1), all of one length: then L2 ranks as the inner product does.

    Their queries have a zero there.
    """
    squares = (keys * keys).sum(axis=1)
    more = np.sqrt(np.maximum(squares.max() - squares, 0))
    return np.ascontiguousarray(np.column_stack([keys, more]).astype(np.float32))


def narrowed(rows: Floats) -> Stored:
    """Return rows as float16 where they fit it: what an index of ours does with them."""
    return to_stored(rows, "float16" if fits(rows, "float16") else "float32")


def with_zero(queries: Floats) -> Floats:
    """Return queries (G, d + 1) for lengthened keys."""
    out = np.zeros((queries.shape[0], queries.shape[1] + 1), np.float32)
    out[:, :-1] = queries
    return out


def rows_for(metric: str, keys: Floats) -> Floats:
    """Return the keys as a graph of that metric holds them: centred, for L2 lengthened too."""
    return centred(keys) if metric == "ip" else lengthened(centred(keys))


def asked_of(metric: str, queries: Floats) -> Floats:
    """Return the queries as a graph of that metric is asked them."""
    return queries if metric == "ip" else with_zero(queries)


class Library:
    """What all libraries' indexes have in common."""

    shares = True

    def build_parts_s(self) -> dict[str, float]:
        """Only the whole is known."""
        return {}


class Flat(Library):
    """faiss IndexFlatIP: every key, float32."""

    name = "flat"
    variants: ClassVar[tuple[Variant, ...]] = ({},)
    widths: ClassVar[tuple[int, ...]] = ()

    def __init__(self) -> None:
        import faiss

        self._faiss, self._index = faiss, faiss.IndexFlatIP(1)
        faiss.omp_set_num_threads(1)

    def build(self, keys: Floats, training: Training) -> None:
        """Copy the keys."""
        self._index = self._faiss.IndexFlatIP(keys.shape[1])
        self._index.add(keys)

    def widen(self, width: int) -> None:
        """Nothing to set."""

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS)."""
        return self.ids(queries, KEYS)

    def ids(self, queries: Floats, count: int) -> Ids:
        """Return `count` ids for each query, (G, count)."""
        return np.asarray(self._index.search(queries, count)[1])

    def counted(self) -> tuple[float | None, float]:
        """All keys."""
        return float(self._index.ntotal), 0.0

    def size_bytes(self) -> int:
        """Return the bytes of the index as faiss writes it."""
        return int(self._faiss.serialize_index(self._index).nbytes)


class Ivf(Flat):
    """faiss IndexIVFFlat: L2 k-means of centred keys, lists probed by inner product."""

    name = "ivf"
    variants = ({"lists": 256}, {"lists": 512}, {"lists": 1024})
    widths = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

    def __init__(self, lists: int) -> None:
        super().__init__()
        self._lists, self._queries = lists, 1

    def _empty(self, quantizer: Any, d: int) -> Any:
        faiss = self._faiss
        return faiss.IndexIVFFlat(quantizer, d, self._lists, faiss.METRIC_INNER_PRODUCT)

    def build(self, keys: Floats, training: Training) -> None:
        """Cluster by L2, then have lists chosen by inner product."""
        faiss, d = self._faiss, keys.shape[1]
        self._lists = max(1, min(self._lists, len(keys) // 4))
        self._near, self._probed = faiss.IndexFlatL2(d), faiss.IndexFlatIP(d)
        self._ivf = self._empty(self._near, d)
        self._ivf.cp.min_points_per_centroid = 1  # spares a warning on stderr
        rows = centred(keys)
        self._ivf.train(rows)
        self._ivf.add(rows)
        self._probed.add(self._near.reconstruct_n(0, self._lists))
        self._ivf.quantizer = self._probed
        self._index = self._ivf

    def widen(self, width: int) -> None:
        """Set nprobe."""
        self._ivf.nprobe = min(width, self._lists)

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS)."""
        self._faiss.cvar.indexIVF_stats.reset()
        self._queries = len(queries)
        return super().search(queries)

    def counted(self) -> tuple[float | None, float]:
        """Return faiss's own count of distances, and the lists' centroids."""
        return self._faiss.cvar.indexIVF_stats.ndis / self._queries, float(self._lists)


class IvfCodes(Ivf):
    """An IVF of short codes whose best keys are ranked again by exact keys kept beside it."""

    def __init__(self, lists: int, again: int) -> None:
        super().__init__(lists)
        self._again = again

    def build(self, keys: Floats, training: Training) -> None:
        """Build the lists of codes; `again` times KEYS of them are looked up exactly."""
        super().build(keys, training)
        self._exact = self._faiss.IndexFlatIP(keys.shape[1])
        self._exact.add(centred(keys))
        self._index = self._faiss.IndexRefine(self._ivf, self._exact)
        self._index.k_factor = self._again


class IvfFastScan(IvfCodes):
    """faiss IndexIVFPQFastScan, 4 bits a pair of channels."""

    name = "ivfpq"
    variants = tuple(
        {"lists": lists, "again": again} for lists in (128, 256) for again in (2, 4, 8, 16)
    )

    def _empty(self, quantizer: Any, d: int) -> Any:
        faiss = self._faiss
        return faiss.IndexIVFPQFastScan(
            quantizer, d, self._lists, d // 2, 4, faiss.METRIC_INNER_PRODUCT
        )

    def counted(self) -> tuple[float | None, float]:
        """Return nothing for the keys: faiss does not count a fast scan's; the lists' centroids."""
        return None, float(self._lists)


class IvfBytes(IvfCodes):
    """faiss IndexIVFScalarQuantizer, 8 bits a channel."""

    name = "ivfsq"
    variants = ({"lists": 256, "again": 2}, {"lists": 512, "again": 2})

    def _empty(self, quantizer: Any, d: int) -> Any:
        faiss = self._faiss
        return faiss.IndexIVFScalarQuantizer(
            quantizer, d, self._lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )


class Hnsw(Flat):
    """faiss IndexHNSWFlat."""

    name = "hnsw"
    variants = GRAPH_VARIANTS
    widths = BEAMS

    def __init__(self, links: int, metric: str) -> None:
        super().__init__()
        self._links, self._metric, self._queries = links, metric, 1

    def build(self, keys: Floats, training: Training) -> None:
        """Insert the keys in their order."""
        faiss = self._faiss
        rows = rows_for(self._metric, keys)
        metric = faiss.METRIC_INNER_PRODUCT if self._metric == "ip" else faiss.METRIC_L2
        self._index = faiss.IndexHNSWFlat(rows.shape[1], self._links, metric)
        self._index.hnsw.efConstruction = BUILD_BEAM
        self._index.add(rows)

    def widen(self, width: int) -> None:
        """Set efSearch."""
        self._index.hnsw.efSearch = width

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS)."""
        self._faiss.cvar.hnsw_stats.reset()
        self._queries = len(queries)
        return super().search(asked_of(self._metric, queries))

    def counted(self) -> tuple[float | None, float]:
        """Return faiss's own count of distances."""
        return self._faiss.cvar.hnsw_stats.ndis / self._queries, 0.0


class Hnswlib(Library):
    """hnswlib's Index."""

    name = "hnswlib"
    variants: ClassVar[tuple[Variant, ...]] = GRAPH_VARIANTS
    widths: ClassVar[tuple[int, ...]] = BEAMS

    def __init__(self, links: int, metric: str) -> None:
        import hnswlib

        self._hnswlib, self._links, self._metric = hnswlib, links, metric

    def build(self, keys: Floats, training: Training) -> None:
        """Insert the keys in their order."""
        rows = rows_for(self._metric, keys)
        self._index = self._hnswlib.Index(space=self._metric, dim=rows.shape[1])
        self._index.init_index(
            max_elements=len(rows), M=self._links, ef_construction=BUILD_BEAM, random_seed=0
        )
        self._index.set_num_threads(1)
        self._index.add_items(rows)

    def widen(self, width: int) -> None:
        """Set ef."""
        self._index.set_ef(width)

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS)."""
        found = self._index.knn_query(asked_of(self._metric, queries), KEYS)
        return np.asarray(found[0]).view(np.int64)

    def counted(self) -> tuple[float | None, float]:
        """Return nothing: its Python interface gives no count."""
        return None, 0.0

    def size_bytes(self) -> int:
        """Return the bytes of the index as hnswlib would write it."""
        return int(self._index.index_file_size())


class Usearch(Library):
    """USearch's Index, float32."""

    name = "usearch"
    variants: ClassVar[tuple[Variant, ...]] = GRAPH_VARIANTS
    widths: ClassVar[tuple[int, ...]] = BEAMS

    def __init__(self, links: int, metric: str) -> None:
        from usearch.index import Index

        self._make, self._links, self._metric, self._scored = Index, links, metric, 0.0

    def build(self, keys: Floats, training: Training) -> None:
        """Insert the keys in their order."""
        rows = rows_for(self._metric, keys)
        self._index = self._make(
            ndim=rows.shape[1],
            metric="ip" if self._metric == "ip" else "l2sq",
            dtype="f32",
            connectivity=self._links,
            expansion_add=BUILD_BEAM,
        )
        self._index.add(np.arange(len(rows), dtype=np.uint64), rows, threads=1)

    def widen(self, width: int) -> None:
        """Set expansion_search."""
        self._index.expansion_search = width

    def search(self, queries: Floats) -> Ids:
        """Return ids (G, KEYS)."""
        found = self._index.search(asked_of(self._metric, queries), KEYS, threads=1)
        self._scored = found.computed_distances / len(queries)
        ids: NDArray[np.int64] = np.ascontiguousarray(found.keys).view(np.int64)
        return np.where(np.arange(KEYS) < np.asarray(found.counts)[:, None], ids, -1)

    def counted(self) -> tuple[float | None, float]:
        """Return USearch's own count of distances."""
        return self._scored, 0.0

    def size_bytes(self) -> int:
        """Return the bytes of the index as USearch would write it."""
        return int(self._index.serialized_length)


LIBRARIES = {kind.name: kind for kind in (Flat, Ivf, IvfFastScan, IvfBytes, Hnsw, Hnswlib, Usearch)}
