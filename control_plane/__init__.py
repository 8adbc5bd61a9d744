"""Who may do what, when and at what price: one package per noun, and the entrances `api`, `client`, `cli` and `console`."""
