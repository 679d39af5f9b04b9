"""Which sizes of passes are recorded, and which a kind of model was asked for most."""
