"""openbook.client"""
