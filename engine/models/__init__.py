"""Language models, one a file. `engine.load` chooses among them."""
