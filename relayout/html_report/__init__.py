"""`report`: one self-contained HTML page that shows where every rank's bytes are."""
