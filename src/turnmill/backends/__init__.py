"""The implementations of `turnmill.ports`, one package a backend. `wiring` chooses; nobody else imports them."""
