"""PhyAI's serving: protocols, gateway, model server and clients. Importing it loads nothing."""
