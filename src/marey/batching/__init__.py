"""How samples share a forward pass: transport, layout, the isolation predicate and the attention that obeys it."""
