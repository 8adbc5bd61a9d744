"""Of the tokens of attempts' agents, the database keeps hashes.

Revision ID: agent_tokens
"""

from alembic import op

revision = "agent_tokens"
down_revision = "signatures_and_audit_chain"

HASHES = """
CREATE TABLE agent_tokens (
    sha256 text NOT NULL,
    job_id text NOT NULL,
    attempt integer NOT NULL,
    CONSTRAINT pk_agent_tokens PRIMARY KEY (sha256),
    CONSTRAINT fk_agent_tokens_job_id FOREIGN KEY (job_id, attempt) REFERENCES attempts(job_id, attempt)
);
CREATE INDEX ix_agent_tokens_job_id ON agent_tokens (job_id);
GRANT SELECT, INSERT, DELETE ON agent_tokens TO ft_platform;
INSERT INTO agent_tokens SELECT DISTINCT encode(sha256(convert_to(token, 'UTF8')), 'hex'), job_id, attempt FROM agents;
ALTER TABLE agents DROP COLUMN token;
"""


def upgrade() -> None:
    op.execute(HASHES)
