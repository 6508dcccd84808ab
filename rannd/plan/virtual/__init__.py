"""Plans with several stages per slot (virtual stages): interleaved 1F1B and ZB-V.

`virtual_asked` says what the configuration wants, `virtual_shapes` which plans there are, `slot_cuts` cuts them,
`virtual_plans` fits them into memory and simulates them. `virtual_search` tries the promising ones: begin there.
"""
