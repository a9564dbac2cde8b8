"""openbook.indexstore: arrays and files, without models and without a network.

                     build.py    clusters.py + codes.py make a HeadIndex of keys, values, queries
                        |        (graph.py adds a graph, to measure)
    draft.py, store.py  v        layer.py, layout.py, shard.py, manifest.py: what is on disk
        write ---> HeadIndex ---> stored.py opens it again, verified, as read-only views
                        |        (held.py: its lock and files; mapped.py: its pages, guarded)
                        |
                        v
                     attend.py   _layer.pyx attends to what _probe.pyx finds by clusters, heads
                                 side by side; _search.pyx scans or walks, _attend.pyx then
                                 attends, or to all

head.py holds the words that all of them share; reference.py, reference_build.py and
reference_probe.py the plain twins of the kernels; dtypes.py how a number is stored; plan.py how far
each head's search goes; lift.py what the estimate lacks.
"""
