"""openbook.server"""
