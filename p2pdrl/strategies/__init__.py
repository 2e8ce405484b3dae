"""How the swarm agrees: whom to meet and with which weight (pure cores), and the exchange itself (I/O)."""
