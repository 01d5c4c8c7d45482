"""Proof on the user's own model: engines run in processes of their own, and compared."""
