"""Every parameter of every rank, by an engine's own loader and through relayout. Modules run in its environment."""
