"""Measurements of the engine, the server and the model at full size: what ``berrylm bench`` runs."""
