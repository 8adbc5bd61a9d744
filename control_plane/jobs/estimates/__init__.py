"""How long a job takes, what it costs, and what a base model can be asked for."""
