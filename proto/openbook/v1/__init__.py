"""openbook.v1: the messages and stubs generated from contexts.proto."""
