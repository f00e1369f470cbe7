"""Federated averaging on handwritten digits, with compressed messages."""
