"""`report`: writes one self-contained HTML page with the location of every rank's bytes."""
