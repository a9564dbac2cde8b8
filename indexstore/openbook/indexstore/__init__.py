"""openbook.indexstore: arrays and files, without models and without a network.

                     build.py    clusters.py + graph.py make a HeadIndex of keys, values, queries
                        |
    draft.py, store.py  v        layer.py, layout.py, shard.py, manifest.py: what is on disk
        write ---> HeadIndex ---> stored.py opens it again, verified, as read-only views
                        |        (held.py: its lock and files; mapped.py: its pages, guarded)
                        |
                        v
                     attend.py   searches (_search.pyx) and attends (_attend.pyx), or scans

head.py holds the words that all of them share; reference.py and reference_build.py the plain twin
of every kernel; dtypes.py how a number is stored; plan.py which heads scan and which walk.
"""
