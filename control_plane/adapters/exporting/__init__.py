"""Orders of exports, as the queue, attempts and the worker see them."""
