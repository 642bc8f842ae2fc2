from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository, from which child processes import."""
