"""The training stage's predictions against what real steps take."""
