"""openbook.server: network, catalog, leases and the ingest queue; no tensors.

commands -> settings, app          what a person starts
app      -> everything below       assembles the parts, serves, drains
service  -> catalog, documents     gRPC in, domain out; `messages` and `asks` translate
catalog  -> indexstore             which contexts there are; the disk decides
ingest_worker -> ingest_queue      one document at a time, in its own thread
decode_worker -> leases            opened contexts and running answers
broker   -> valkey                 a Redis that may be lost at any moment
"""
