"""`unmask serve --workers`: processes that have the model, behind one port."""
