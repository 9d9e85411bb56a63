"""Parts of the tiny model for `sql-agent`; `models.make_sql_model` puts them together."""
