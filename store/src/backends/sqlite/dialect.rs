//! How SQLite reads a statement that is written for PostgreSQL.

/// Clauses that SQLite does not need: its only writer locks everything, and its columns have no
/// width.
const NOT_NEEDED: [&str; 7] = [" FOR NO KEY UPDATE", " FOR KEY SHARE", " FOR UPDATE", " SKIP LOCKED", "::bigint", "/* ", " */"];

/// Translates a statement. Where PostgreSQL takes a list, SQLite takes it as JSON, but the list
/// that is parameter `keys`: for that one the statement is run for each element. Where PostgreSQL
/// works on rows from `unnest`, SQLite runs the statement for each row.
pub(super) fn translate(postgres: &str, keys: Option<usize>) -> String {
    let mut text = each_row(postgres);
    for word in NOT_NEEDED {
        text = text.replace(word, "");
    }
    text = selections(text.replace("GREATEST(", "MAX("));
    if let Some(keys) = keys {
        text = text.replace(&format!("= ANY(${keys})"), &format!("= ${keys}"));
    }
    lists(&text).replace('$', "?")
}

/// `= ANY(ARRAY(SELECT …))` is `IN (SELECT …)`.
fn selections(mut text: String) -> String {
    const BEGIN: &str = "= ANY(ARRAY(";
    while let Some(at) = text.find(BEGIN) {
        let inside = at + BEGIN.len();
        let mut depth = 1;
        let end = text[inside..].find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth == 0
        });
        let Some(end) = end.map(|end| inside + end) else { return text };
        text.replace_range(end..=end, "");
        text.replace_range(at..inside, "IN (");
    }
    text
}

/// `= ANY($1)` and `<> ALL($1)` of a list.
fn lists(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 32);
    let mut rest = text;
    while let Some((at, word, other)) =
        [("= ANY($", "IN"), ("<> ALL($", "NOT IN")].iter().filter_map(|(word, other)| Some((rest.find(word)?, *word, *other))).min()
    {
        let after = &rest[at + word.len()..];
        let (number, behind) = after.split_once(')').unwrap_or((after, ""));
        out.push_str(&rest[..at]);
        out.push_str(&format!("{other} (SELECT value FROM json_each(${number}))"));
        rest = behind;
    }
    out + rest
}

/// Rows from `unnest($1, …) AS u(…)` of an UPDATE or INSERT: `u.name` is the parameter of that
/// column.
fn each_row(postgres: &str) -> String {
    let parts = || {
        let (before, rest) = postgres.split_once("FROM unnest(")?;
        let (_, rest) = rest.split_once("AS u(")?;
        let (names, after) = rest.split_once(')')?;
        Some((before, names, after))
    };
    let Some((before, names, after)) = parts() else { return postgres.to_owned() };
    let insert = before.split_once("SELECT ").filter(|_| postgres.starts_with("INSERT"));
    let mut text = match insert {
        // Not INSERT … SELECT: SQLite journals a statement that may write several rows.
        Some((insert, row)) => format!("{insert}VALUES ({}){}", row.trim_end(), after.split(" ORDER BY").next().unwrap_or(after)),
        None => format!("{before}{after}"),
    };
    let mut number_of_row = None;
    for (position, name) in names.split(", ").enumerate() {
        let parameter = match postgres.contains(&format!("${}::", position + 1)) {
            true => position + 1,
            // The number of the row comes behind all other parameters.
            false => *number_of_row.get_or_insert_with(|| 1 + parameters(postgres)),
        };
        text = replace_word(&text, &format!("u.{name}"), &format!("${parameter}"));
    }
    text
}

/// How many parameters a statement has.
fn parameters(text: &str) -> usize {
    let number = |after: &str| after.split(|c: char| !c.is_ascii_digit()).next().and_then(|number| number.parse().ok());
    text.split('$').skip(1).filter_map(number).max().unwrap_or(0)
}

/// Replaces a word, but not the beginning of a longer one.
fn replace_word(text: &str, word: &str, other: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let after = &rest[at + word.len()..];
        let whole = !after.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        out.push_str(&rest[..at]);
        out.push_str(if whole { other } else { word });
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::translate;

    #[test]
    fn parameters_locks_casts_and_functions() {
        let found =
            translate("SELECT GREATEST($1::bigint, a) FROM t /* INDEXED BY i */ WHERE b = $2 ORDER BY a FOR UPDATE SKIP LOCKED", None);
        assert_eq!(found, "SELECT MAX(?1, a) FROM t INDEXED BY i WHERE b = ?2 ORDER BY a");
    }

    #[test]
    fn lists_are_json_but_the_one_that_is_run_for_each_element() {
        let text = "SELECT a FROM t WHERE b = ANY($1) AND c <> ALL($2)";
        let json = "(SELECT value FROM json_each(?2))";
        let found = translate(text, Some(1));
        assert_eq!(found, format!("SELECT a FROM t WHERE b = ?1 AND c NOT IN {json}"));
        let found = translate(text, None);
        assert_eq!(found, format!("SELECT a FROM t WHERE b IN (SELECT value FROM json_each(?1)) AND c NOT IN {json}"));
    }

    #[test]
    fn a_selection_that_postgresql_makes_once() {
        let text = "DELETE FROM t WHERE id = ANY(ARRAY(SELECT id FROM t WHERE (a) = ANY($1) LIMIT $2 FOR UPDATE)) AND b < $3";
        let found = translate(text, None);
        assert_eq!(
            found,
            "DELETE FROM t WHERE id IN (SELECT id FROM t WHERE (a) IN (SELECT value FROM json_each(?1)) LIMIT ?2) AND b < ?3"
        );
    }

    #[test]
    fn rows_are_run_one_by_one() {
        let update = "UPDATE t AS o SET a = o.a + u.at, b = $3 FROM unnest($1::bigint[], $2::bigint[]) AS u(id, at) WHERE o.id = u.id";
        assert_eq!(translate(update, None), "UPDATE t AS o SET a = o.a + ?2, b = ?3  WHERE o.id = ?1");
        let insert =
            "INSERT INTO t (a, b, n) SELECT $2, u.digest, u.n - 1 FROM unnest($1::bytea[]) WITH ORDINALITY AS u(digest, n) ORDER BY u.n";
        assert_eq!(translate(insert, None), "INSERT INTO t (a, b, n) VALUES (?2, ?1, ?3 - 1)");
        let conflict = "INSERT INTO t (a) SELECT u.a FROM unnest($1::bigint[]) AS u(a) ON CONFLICT (a) DO NOTHING";
        assert_eq!(translate(conflict, None), "INSERT INTO t (a) VALUES (?1) ON CONFLICT (a) DO NOTHING");
    }
}
