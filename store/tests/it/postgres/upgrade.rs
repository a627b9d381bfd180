//! Databases that an earlier version wrote.

use pfr_store::{Clock, Lease, PostgresMetadata, PostgresOptions};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, SqlSafeStr as _, raw_sql};

/// Rows of the first version: two sessions, a snapshot whose object is leased, and what collection
/// is to look at.
const ROWS: &str = r#"
    INSERT INTO repositories (id, domain, name) VALUES (1, 1, 'a');
    INSERT INTO pushes (id, repository, expires) VALUES ('later', 1, 200), ('sooner', 1, 100);
    INSERT INTO packs (id, key, state, keep_until) VALUES (1, 'p', 'live', 0);
    INSERT INTO objects (id, domain, digest, size, kind, keep_until, pack, "offset", frame_len, codec)
      VALUES (7, 1, decode('01' || repeat('07', 32), 'hex'), 1, 0, 150, 1, 8, 1, 0);
    INSERT INTO manifests (id, repository, object, pushed_at, used_at, logical_bytes, new_bytes) VALUES (3, 1, 7, 1, 1, 1, 1);
    INSERT INTO suspects (due, pack) VALUES (150, 1);
    INSERT INTO suspects (due, object) VALUES (150, 7);
"#;

/// All migrations, as the files say.
fn migrations() -> Vec<Migration> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations/postgres");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let migration = |(version, file)| {
        let sql = AssertSqlSafe(std::fs::read_to_string(file).unwrap()).into_sql_str();
        Migration::new(version, "of a test".into(), MigrationType::Simple, sql, false)
    };
    (1_i64..).zip(files).map(migration).collect()
}

#[tokio::test]
async fn a_database_of_the_first_version_and_one_of_the_version_before_keep_leases_and_sessions() {
    let all = migrations();
    let before = i64::try_from(all.len()).unwrap() - 1;
    let migrator = Migrator::with_migrations(all);
    for version in [1, before] {
        let url = pfr_testkit::postgres::database();
        let mut old = PgConnection::connect(&url).await.unwrap();
        migrator.run_direct(Some(1), &mut old, false).await.unwrap();
        raw_sql(ROWS).execute(&mut old).await.unwrap();
        migrator.run_direct(Some(version), &mut old, false).await.unwrap();
        old.close().await.unwrap();
        let options = PostgresOptions { max_connections: 2, clock: Some(Clock::new(|| 90)), ..PostgresOptions::default() };
        let metadata = PostgresMetadata::connect(&url, options).await.unwrap();
        let open = metadata.unfinished(10).await.unwrap();
        let open: Vec<(i64, u64)> = open.iter().map(|session| (session.session, session.until)).collect();
        assert_eq!(open, [(1, 200), (2, 100)], "from version {version}");
        assert_eq!(metadata.leases(vec![7]).await.unwrap(), [(7, Lease { until: 150, session: None })], "from version {version}");
        let queue = metadata.queue(false, 10).await.unwrap();
        assert_eq!(queue.iter().map(|entry| entry.released).collect::<Vec<_>>(), [true, false], "from version {version}");
        let unprefixed = metadata.unprefixed(0, 10).await.unwrap();
        let unprefixed: Vec<(i64, String)> = unprefixed.iter().map(|(id, digest)| (*id, digest.hex())).collect();
        assert_eq!(unprefixed, [(3, "07".repeat(32))], "from version {version}");
    }
}
