"""openbook.worker"""
