//! `droptrace schema`: the JSON schema of a line of JSON output.

use std::process::ExitCode;

use crate::diagnose::Record;

pub(super) fn run() -> anyhow::Result<ExitCode> {
    super::print(&text()?)?;
    Ok(ExitCode::SUCCESS)
}

fn text() -> serde_json::Result<String> {
    Ok(serde_json::to_string_pretty(&schemars::schema_for!(Record))? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::samples;

    #[test]
    fn the_checked_in_schema_is_this_one() {
        let checked_in = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/schema.json"));
        assert!(
            checked_in == text().unwrap(),
            "docs/schema.json is out of date: droptrace schema > docs/schema.json"
        );
    }

    #[test]
    fn every_type_of_record_is_valid() {
        let schema = serde_json::from_str(&text().unwrap()).unwrap();
        let validator = jsonschema::validator_for(&schema).unwrap();
        let (diagnosed, ..) = samples::diagnosed();
        for record in samples::records_of_every_drop()
            .into_iter()
            .chain([diagnosed, Record::Name(samples::name())])
        {
            let line = serde_json::to_value(&record).unwrap();
            let errors: Vec<_> = validator
                .iter_errors(&line)
                .map(|error| error.to_string())
                .collect();
            assert!(errors.is_empty(), "{line}: {errors:?}");
        }
    }

    #[test]
    fn what_is_no_record_is_invalid() {
        let schema = serde_json::from_str(&text().unwrap()).unwrap();
        let validator = jsonschema::validator_for(&schema).unwrap();
        let mut line = serde_json::to_value(&samples::records()[1]).unwrap();
        line["verdict"] = "lost".into();
        assert!(!validator.is_valid(&line));
        assert!(!validator.is_valid(&serde_json::json!({"type": "rumour"})));
    }
}
