"""openbook.indexstore: arrays and files, without models and without a network."""
